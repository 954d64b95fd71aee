"""A little text of many kinds, for what must see realistic activations: the routers of an upcycled model.

Prose, dialogue, arithmetic, lists, tables, code and instructions, written for this file. It is short on purpose: it
only has to show in which directions hidden states differ, not to teach anything.
"""

from __future__ import annotations

PASSAGES: tuple[str, ...] = (
    "The river had been rising since noon, and by evening the lower meadow was a lake in which the fence posts stood "
    "like a row of patient herons. Nobody in the village was surprised; it happened every spring.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. Chlorophyll absorbs mostly red and "
    "blue light, which is why leaves look green.",
    "Question: A baker makes 12 trays of rolls with 8 rolls on each tray and sells 71 of them. How many rolls are "
    "left?\nAnswer: 12 * 8 = 96 rolls. 96 - 71 = 25. There are 25 rolls left.",
    "def running_mean(values):\n    total = 0.0\n    means = []\n    for count, value in enumerate(values, "
    "start=1):\n        total += value\n        means.append(total / count)\n    return means\n",
    "17 + 26 = 43\n58 - 39 = 19\n6 * 7 = 42\n81 / 9 = 9\n(4 + 5) * 3 = 27\n100 - 2 * 15 = 70\n7 - 12 = -5\n",
    "Shopping list:\n- two litres of milk\n- half a kilo of flour\n- six eggs\n- a lemon\n- matches\n- washing "
    "powder\n",
    '"You are late," said Anna without looking up. "The train stood for an hour outside Lyon," he answered. "I sent '
    'you a message." "My phone is in the sea," she said, and then, at last, she laughed.',
    "The capital of Italy is Rome. The capital of Japan is Tokyo. The capital of Kenya is Nairobi. The capital of "
    "Peru is Lima. The capital of Norway is Oslo.",
    "| city | area (km2) | population |\n|---|---|---|\n| Aarhus | 91 | 285,000 |\n| Bergen | 465 | 291,000 |\n| "
    "Cork | 187 | 224,000 |\n",
    "To change a tyre: 1. Stop on firm, level ground and pull the handbrake. 2. Loosen the nuts by half a turn. 3. "
    "Raise the car. 4. Take off the nuts and the wheel. 5. Fit the spare, tighten the nuts by hand, lower the car, "
    "tighten again.",
    "Sort these words: pear, apple, quince, fig, banana.\nSorted: apple, banana, fig, pear, quince.\nReverse the "
    "word: garden.\nReversed: nedrag.\nCount the letters in: window.\nCount: 6.\n",
    "In 1848 revolutions ran through Europe faster than the railways that carried the news. Most failed within two "
    "years, yet many of their demands became law before the century was over.",
    "SELECT customer.name, COUNT(*) AS orders\nFROM customer JOIN purchase ON purchase.customer_id = customer.id\n"
    "WHERE purchase.year = 2019\nGROUP BY customer.name\nORDER BY orders DESC LIMIT 10;\n",
    "Dear Ms Okafor,\n\nThank you for your letter of 3 May. We are sorry that the parcel arrived damaged. A "
    "replacement left our warehouse this morning and should reach you by Friday.\n\nYours sincerely,\nT. Lindqvist\n",
    "If all roses are flowers and some flowers fade quickly, it does not follow that some roses fade quickly: the "
    "flowers that fade might be tulips.",
    "import json\n\nclass Store:\n    def __init__(self, path):\n        self.path = path\n\n    def "
    "read(self):\n        with open(self.path) as file:\n            return json.load(file)\n",
    "A triangle has sides 3, 4 and 5. Because 3^2 + 4^2 = 9 + 16 = 25 = 5^2, the angle between the short sides is a "
    "right angle, and the area is 3 * 4 / 2 = 6.",
    "Step 1: x + 5 = 12\nStep 2: x = 12 - 5\nStep 3: x = 7\nCheck: 7 + 5 = 12, correct.\n",
    "The heart pumps about five litres of blood a minute at rest. Arteries carry it away from the heart, veins bring "
    "it back, and capillaries, thinner than a hair, do the exchange in between.",
    "True or false? Water boils at a lower temperature on a mountain. True, because the air pressure is lower there.",
    "0 1 1 2 3 5 8 13 21 34 55 89\n2 4 8 16 32 64 128 256\n1 4 9 16 25 36 49 64 81 100\n",
    "Wind: north-west 4 to 5, increasing 6 later. Sea state: moderate or rough. Weather: showers. Visibility: good.",
)
"""Independent passages; 20 to 60 tokens each with a subword vocabulary."""

CHATS: tuple[tuple[str, str], ...] = (
    ("What is 34 + 57?", "34 + 57 = 91"),
    ("Name three colours of the rainbow.", "Red, green and violet."),
    ("Write the numbers from 5 down to 1.", "5, 4, 3, 2, 1"),
    ("Translate 'good morning' into Spanish.", "'Good morning' is 'buenos días' in Spanish."),
    ("I have 3 boxes with 14 pens each. I give away 9 pens. How many are left?", "3 * 14 = 42 pens, and 42 - 9 = 33."),
    (
        "Give me a one-sentence summary of what a database index does.",
        "It lets the database find rows without reading all.",
    ),
    ("Which is larger, 0.7 or 0.65?", "0.7 is larger, because 0.70 > 0.65."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet around the year 1600."),
)
"""Pairs of a user's message and an answer."""

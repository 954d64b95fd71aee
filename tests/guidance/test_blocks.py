"""Memory of frames: lent as long as anybody looks at it, and written again only then."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch

from tracefp4.guidance.blocks import Blocks

SIZE = 1 << 16


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def test_memory_is_aligned_writable_and_nobody_elses() -> None:
    blocks = Blocks(SIZE)
    views = [blocks.take(n) for n in (1, 63, 64, 65, 5000, SIZE - 64, SIZE, 3 * SIZE, 0)]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * len(view)
    for number, view in enumerate(views):
        assert view == bytes([number]) * len(view)
        assert not len(view) or address(view) % 64 == 0
    assert [len(view) for view in views] == [1, 63, 64, 65, 5000, SIZE - 64, SIZE, 3 * SIZE, 0]


def test_a_block_is_written_again_when_its_last_view_is_gone_and_not_before() -> None:
    blocks = Blocks(SIZE)
    first, second = blocks.take(SIZE // 2), blocks.take(SIZE // 2)
    place = address(first)
    blocks.take(SIZE)  # The next block, used and gone; it stays the one that is handed out.
    keepers = [
        second[5:6].toreadonly(),
        np.frombuffer(second, np.uint8)[7:9],
        torch.frombuffer(second, dtype=torch.uint8)[8:].view(2, -1)[:1],
        torch.frombuffer(second, dtype=torch.uint8).view(torch.int32)[4:8],
    ]
    del first, second
    while keepers:
        assert blocks.idle == 0
        keepers.pop()
    gc.collect()
    assert blocks.idle == 1
    assert address(blocks.take(SIZE)) == place


def test_a_reader_never_sees_what_is_written_later() -> None:
    blocks = Blocks(SIZE)
    kept = {}
    for round in range(40):
        view = blocks.take(SIZE // 3)
        view[:] = bytes([round]) * len(view)
        if round % 3 == 0:
            kept[round] = torch.frombuffer(view, dtype=torch.uint8)[100:200]
        del view
    for round, tensor in kept.items():
        assert tensor.eq(round).all()


def test_idle_blocks_are_few() -> None:
    blocks = Blocks(SIZE, idle_bytes=2 * SIZE)
    views = [blocks.take(SIZE) for _ in range(6)]
    views.clear()
    assert blocks.idle == 2
    assert len(blocks.take(2 * SIZE)) == 2 * SIZE and blocks.idle == 2


def test_threads_get_memory_of_their_own() -> None:
    blocks = Blocks(SIZE)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            view = blocks.take(SIZE // 5)
            view[:] = bytes([number]) * len(view)
            if view != bytes([number]) * len(view):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

"""What an FP4 number is, and every choice in making one.

``e2m1``, ``e4m3``, ``e8m0``   the number formats: bytes and codes to values and back
``numerics``                   the choices that the formats leave open, named and hashed
``blocks``                     block scales, global scales and codes: the one implementation, driven by a ``Numerics``
``nvfp4``, ``mxfp4``, ``mxfp8``  presets, and what the formats are for
``spec``                       which numerics a deployed model uses where
"""

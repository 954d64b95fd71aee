"""What chooses codes and scales.

``base``       the interface
``nearest``    each value to its nearest code, with scales of its own
``guided``     the trainer's rounding under guidance: the method of this package; ``guided_e4m3`` for 8-bit elements
``residual``   a second quantized term for what the first one missed
``congruent``  block scales sent as their low two or three bits
``stats``      how often guidance changed something
"""

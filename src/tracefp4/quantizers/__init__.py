"""What chooses codes and scales.

``base``       the interface
``nearest``    each value to its nearest code, with scales of its own
``guided``     the trainer's rounding under guidance: the method of this package
``congruent``  block scales sent as their low two or three bits
``stats``      how often guidance changed something
"""

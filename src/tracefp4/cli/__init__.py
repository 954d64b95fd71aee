"""The command line: one file a command, imported only when that command runs.

``main``     the shell around the commands: lazy loading, errors as one sentence, exit codes
``console``  what commands print: progress on a terminal, plain lines elsewhere, JSON for machines
``doctor``   what this machine can do, and whether the parts fit
``report``   a page for one run, or for several side by side

A command is a function with annotated parameters in a module of its own and one line in ``main.COMMANDS``.
"""

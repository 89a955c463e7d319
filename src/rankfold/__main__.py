"""``python -m rankfold``: the command ``rankfold``."""

from .cli import main

main()

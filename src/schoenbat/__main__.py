"""``python -m schoenbat``: the command ``schoenbat`` of this interpreter, as torchrun starts it."""

from schoenbat.cli import main

if __name__ == "__main__":
    main()

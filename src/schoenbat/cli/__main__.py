"""``python -m schoenbat.cli``: the command ``schoenbat`` of this interpreter."""

from schoenbat.cli import main

if __name__ == "__main__":
    main()

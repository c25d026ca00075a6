"""``python -m opensora_sp.cli``: the command where it is not on the PATH."""

from . import main

if __name__ == "__main__":
    main()

"""``python -m lightning_parm`` is ``lightning-parm``."""

from lightning_parm.cli import main

if __name__ == "__main__":
    main()

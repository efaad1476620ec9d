"""Entry point of `python -m embodrl`."""

from embodrl.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m inferkit`."""

from inferkit.cli import main

if __name__ == "__main__":
    main()

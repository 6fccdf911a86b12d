"""`python -m autodispatch`."""

from autodispatch.cli import main

if __name__ == "__main__":
    main()

"""`python -m bench.scaling`."""

from bench.scaling.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

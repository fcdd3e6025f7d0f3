"""`python -m bench` is `python -m bench.compare`."""

from bench.compare.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

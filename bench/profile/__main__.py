"""`python -m bench.profile`."""

from bench.profile.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

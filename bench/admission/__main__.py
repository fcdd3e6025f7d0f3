"""`python -m bench.admission`."""

from bench.admission.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Entry point of `python -m rp_sched`."""

from rp_sched.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

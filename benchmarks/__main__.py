"""``python -m benchmarks`` measures attention and the modules around it next to their peers."""

from .app import main

if __name__ == "__main__":
    main()

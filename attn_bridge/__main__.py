"""``python -m attn_bridge`` is the console command ``attn-bridge``."""

from .cli import main

if __name__ == "__main__":
    main()

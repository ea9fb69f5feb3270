"""Models from and to the Hugging Face hub: `reading` gives a folder, `publishing` sends one, `card` describes it."""

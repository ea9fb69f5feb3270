"""What decoding keeps of the tokens before."""

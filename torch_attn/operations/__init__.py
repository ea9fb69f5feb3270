"""What torch does in another way than this package needs it."""

"""The numbers a pair is judged on: the calls that were given, and what is drawn."""

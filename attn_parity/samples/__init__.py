"""The numbers a pair is judged on: the user's calls, and drawn weights and inputs."""

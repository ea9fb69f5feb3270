"""What other people's checks run: the GitHub Action (`action.yml`), the hook of pre-commit (`.pre-commit-hooks.yaml`)."""

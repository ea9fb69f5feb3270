"""What other people's checks run: the GitHub Action, `action.yml`, and the hook, `.pre-commit-hooks.yaml`."""

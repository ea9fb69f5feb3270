"""Entry points for users' CI: the GitHub Action, `action.yml`, and the hook, `.pre-commit-hooks.yaml`."""

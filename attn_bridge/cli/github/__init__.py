"""The GitHub Action of this project, `action.yml`: its logic, which runs and is tested without GitHub."""

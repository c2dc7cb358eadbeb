"""What people, workers and sources are shown of the state: questions only, see `views`."""

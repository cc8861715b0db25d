"""What the experiments found, for people and for programs: tables, plots and one format of results."""

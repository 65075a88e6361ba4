"Settings of recipes and launchers, to start from."

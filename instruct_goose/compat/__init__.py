"Other libraries: their settings, losses and names, said in ours."

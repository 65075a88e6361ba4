"Rows of prompts, texts and pairs, read from files and the Hub."

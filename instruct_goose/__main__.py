"`python -m instruct_goose`: the command `instruct-goose`."

from instruct_goose.cli.main import main

if __name__ == "__main__":
    main()

"""Positional[T] on a page: the type T."""


class Positional:
    "A setting that the command line takes without its name; here only its type."

    def __class_getitem__(cls, item: type) -> type:
        return item

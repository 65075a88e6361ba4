"""Float[Tensor, "batch time"] and its kind on a page: the tensor type, without a check."""


class Shaped:
    "A type with a shape; here only the type."

    def __class_getitem__(cls, item: tuple):
        return item[0]


class Float(Shaped):
    pass


class Int(Shaped):
    pass


class Bool(Shaped):
    pass

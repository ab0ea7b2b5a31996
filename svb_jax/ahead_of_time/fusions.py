"""What the fusions of a compiled program compute: a compiler's time goes into those that differ."""

import re


def list_fusions(program: str) -> list[str]:
    """Return what each fusion of a compiled program computes, with its values numbered instead of named.

    XLA's CPU compiler makes a function of every fusion, and one for all that are equal. Custom ones, such as
    products, are a library's and not compiled.
    """
    bodies = dict(re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL))

    def numbered(name: str) -> str:
        numbers: dict[str, str] = {}
        body = re.sub(r", metadata=\{.*?\}", "", bodies[name])
        return re.sub(r"%[\w.\-]+", lambda value: numbers.setdefault(value[0], f"%{len(numbers)}"), body)

    compiled = re.findall(r" fusion\(.*kind=k(?!Custom)\w+, calls=%([\w.\-]+)", program)
    return [numbered(name) for name in compiled]

from pathlib import Path


def write_file(path: str, text: str) -> str:
    """Write a text file.

    Args:
        path: The file's path.
        text: The whole new content.
    """
    Path(path).write_text(text)
    return "written"


def read_file(path: str) -> str:
    """Read a text file.

    Args:
        path: The file's path.
    """
    return Path(path).read_text()

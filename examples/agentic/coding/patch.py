"""Apply a unified diff to the files of a folder. The line numbers are not needed: a hunk is found by its lines."""

from pathlib import Path


class PatchError(Exception):
    """The text says what does not fit. Nothing was changed."""


def apply_patch(folder, text):
    """Apply a diff; returns the changed paths. `--- /dev/null` makes a file, `+++ /dev/null` deletes one."""
    changes = {}
    for old, new, hunks in _files(text.splitlines()):
        path = inside(folder, new if new != "/dev/null" else old)
        if old == "/dev/null":
            lines = []
        elif path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
        else:
            raise PatchError(f"there is no file {old}")
        for hunk in hunks:
            lines = _with_hunk(lines, hunk, path.name)
        changes[path] = None if new == "/dev/null" else "".join(f"{line}\n" for line in lines)
    if not changes:
        raise PatchError("no file is named; begin with --- a/FILE and +++ b/FILE")
    for path, content in changes.items():
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return [str(path.relative_to(Path(folder).resolve())) for path in changes]


def inside(folder, name):
    """A path in the folder. PatchError for one that leads out of it."""
    root = Path(folder).resolve()
    if "\0" in name:
        raise PatchError("a path has no NUL character")
    path = (root / name).resolve()
    if path != root and root not in path.parents:
        raise PatchError(f"{name} is outside of the project")
    return path


def _files(lines):
    """(old name, new name, hunks) of each file; a hunk is a list of lines with their first character."""
    found = []
    for i, line in enumerate(lines):
        if line.startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            found.append((_name(line, "a/"), _name(lines[i + 1], "b/"), []))
        elif line.startswith("+++ ") and i and lines[i - 1].startswith("--- "):
            continue
        elif line.startswith("@@") and found:
            found[-1][2].append([])
        elif found and found[-1][2] and not line.startswith("\\"):
            found[-1][2][-1].append(line or " ")
    return found


def _name(line, prefix):
    return line[4:].split("\t")[0].strip().removeprefix(prefix)


def _with_hunk(lines, hunk, name):
    while hunk and hunk[-1] == " " and len(hunk) > 1:  # empty lines after the diff
        hunk = hunk[:-1]
    if strange := [line for line in hunk if line[0] not in " +-"]:
        raise PatchError(f"lines of a hunk begin with a space, + or -; {strange[0]!r} does not")
    old = [line[1:] for line in hunk if line[0] in " -"]
    new = [line[1:] for line in hunk if line[0] in " +"]
    places = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
    if not old and lines:
        raise PatchError(f"a hunk for {name} has no lines of the file by which to find its place")
    if len(places) != 1 and old:
        raise PatchError(
            f"{'no' if not places else 'more than one'} place in {name} has these lines:\n" + "\n".join(old)
        )
    at = places[0] if places else 0
    return [*lines[:at], *new, *lines[at + len(old) :]]

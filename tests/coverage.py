"""Lines that nothing reached, by function, held to the page that names them; for tests/coverage.sh.

Reads what `llvm-cov export -format=lcov` wrote and the sources that it names. Tests are not counted:
modules called tests, in files of their own or at the end of one.
"""

import collections
import pathlib
import re
import sys

FUNCTION = re.compile(r'(pub(\([a-z ]+\))? )?(const )?(unsafe )?(extern "C" )?fn (?P<name>\w+)')
OWNER = re.compile(r"(?:unsafe )?impl(?:<.*?>)? (?:.* for )?[&(]?(?:\w+::)*(?P<name>\w+)")
TRAIT = re.compile(r"(?:pub(?:\([a-z ]+\))? )?(?:unsafe )?trait (?P<name>\w+)")
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def short(path):
    return path.removeprefix("crates/").replace("/src/", "/")


def counts(lcov, root, measured):
    """Path in the project -> line -> how often it ran."""
    files = collections.defaultdict(dict)
    lines = None
    for entry in lcov.read_text().splitlines():
        if entry.startswith("SF:"):
            path = entry[3:].removeprefix(f"{root}/")
            wanted = re.match(measured, path) and not re.search(r"/tests/|tests\.rs$", path)
            lines = files[path] if wanted else None
        elif lines is not None and entry.startswith("DA:"):
            line, count = map(int, entry[3:].split(",")[:2])
            lines[line] = max(count, lines.get(line, 0))
    return files


def functions(source):
    """Line -> the innermost function around it, and the line at which the tests begin.

    A function ends where rustfmt puts its brace: under the beginning of its own line.
    """
    names, stack, owner = {}, [], ""
    for number, line in enumerate(source, 1):
        if line.startswith("mod tests {"):
            return names, number
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        if indent == 0 and (header := OWNER.match(text) or TRAIT.match(text)):
            owner = header["name"] + "::"
        elif (function := FUNCTION.match(text)) and not text.endswith(";"):
            stack.append((indent, (owner if indent else "") + function["name"]))
        names[number] = stack[-1][1] if stack else "outside functions"
        if stack and indent == stack[-1][0]:
            if text.startswith("}") or text.endswith((");", "}")) or re.match(r"\).*;$", text):
                stack.pop()
        if line == "}":
            owner, stack = "", []
    return names, len(source) + 1


def spans(lines):
    """[3, 4, 5, 9] -> "3-5 9"."""
    found = []
    for line in sorted(lines):
        if found and line <= found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def named(page):
    """(file, function) of each row of the page; a function `*` stands for all of a file or a directory."""
    pairs = set()
    for line in page.read_text().splitlines():
        if re.match(r"\| `[a-z-]+/", line):
            cells = line.split("|")
            (path,) = re.findall(r"`([^`]+)`", cells[1])
            pairs.update((path, function) for function in re.findall(r"`([^`]+)`", cells[2]))
    return pairs


def main():
    lcov, page, root, measured, record = sys.argv[1:]
    page, root = pathlib.Path(page), pathlib.Path(root)
    table, crates, missed = [], collections.defaultdict(lambda: [0, 0]), {}
    for path, lines in sorted(counts(pathlib.Path(lcov), root, measured).items()):
        source = (root / path).read_text().splitlines()
        names, tests = functions(source)
        # The brace behind a block is the way past it.
        lines = {
            line: count
            for line, count in lines.items()
            if line < tests and re.search(r"\w", source[line - 1])
        }
        reached = sum(count > 0 for count in lines.values())
        for line, count in lines.items():
            if count == 0:
                missed.setdefault((short(path), names[line]), []).append(line)
        if lines:
            table.append((short(path), reached, len(lines)))
            crate = crates[short(path).split("/")[0]]
            crate[0] += reached
            crate[1] += len(lines)

    row = "| {} | {} of {} | {:.1f} % |".format
    figures = [row(f"**{name}**", *both, 100 * both[0] / both[1]) for name, both in crates.items()]
    figures += [row(f"`{path}`", a, b, 100 * a / b) for path, a, b in table if a < b]
    figures = "\n".join(["| lines of | reached | |", "|---|---|---|", *figures])
    print(figures)
    text = page.read_text()
    if record:
        before, rest = text.split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{figures}\n{rest[rest.index(END):]}")

    pairs, used, unnamed = named(page), set(), []
    for (path, function), lines in sorted(missed.items()):
        above = [str(parent) + "/" for parent in pathlib.PurePath(path).parents]
        fitting = {(path, function), (path, "*"), *((parent, "*") for parent in above)} & pairs
        used |= fitting
        if not fitting:
            unnamed.append(f"{path}: {function}: {spans(lines)}")
    for path, function in sorted(pairs - used):
        print(f"named in {page}, and reached or gone: {path}: {function}")
    for entry in unnamed:
        print(f"not reached, and not named in {page}: {entry}")
    sys.exit(bool(unnamed))


main()

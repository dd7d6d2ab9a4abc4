"""Runs train.py with each form of allocator, and compares: losses and tokens must be equal to the last digit.

    compare.py [FILE]      writes the JSON to FILE as well
"""

import json
import pathlib
import subprocess
import sys
import time

import common


def run(mode: str) -> dict:
    begin = time.perf_counter()
    script = pathlib.Path(__file__).with_name("train.py")
    done = subprocess.run([sys.executable, script, mode], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = next((line for line in lines if "losses" in line), None)
    common.check(f"{mode} ran", done.returncode == 0 and found, seconds=round(time.perf_counter() - begin, 1))
    if found is None:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
        return {}
    return found


def main():
    results = {mode: run(mode) for mode in common.MODES}
    reference = results["native"]
    for mode in common.MODES[1:]:
        for what in ("losses", "tokens"):
            same = bool(reference) and results[mode].get(what) == reference.get(what)
            common.check(f"{what} of {mode} are those of native", same, count=len(reference.get(what, [])))
    if reference:
        print(f"| mode | last loss | peak physical, MiB | step median, ms | step p99, ms |\n|---|---|---|---|---|")
        for mode, it in results.items():
            if it:
                print(
                    f"| {mode} | {it['losses'][-1]} | {it['peak_physical_bytes'] / 2**20:.0f} "
                    f"| {it['step_seconds_median'] * 1e3:.2f} | {it['step_seconds_p99'] * 1e3:.2f} |"
                )
    for it in results.values():
        it.pop("tokens", None)
    common.say(compare=results)
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")
    common.finish()


if __name__ == "__main__":
    main()

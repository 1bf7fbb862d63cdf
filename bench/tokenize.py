"""How fast text becomes tokens: fineweb.py's way against the obvious one, same files, same run, equal bytes.

    python bench/tokenize.py FOLDER_OF_PARQUET          # FineWeb-Edu's layout, GPT-2's tokenizer
    python bench/tokenize.py FOLDER --json              # the same as one line for programs

The obvious way hands one document a task to pool.imap, encodes it into a Python list and makes an array of that. Each
run reads the files --passes times, so that starting the processes, which both times include, weighs little. On a busy
machine look at the processor time, of all processes together: others do not take from it. From the rate follow the
hours, the disk and the money for 10B, 100B and 1.3T tokens.
"""
import sys

if __name__ == "tokenize":
    # Python puts the folder of a script first on its path, so another script in this folder that says `import tokenize`
    # (torch does, through inspect) means the standard library's module and finds this file: give it the right one.
    import importlib.util
    import sysconfig
    _spec = importlib.util.spec_from_file_location("tokenize", sysconfig.get_path("stdlib") + "/tokenize.py")
    sys.modules["tokenize"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["tokenize"])
else:
    import os
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the project, and not this folder

    import hashlib
    import json
    import multiprocessing
    import resource
    import time
    from dataclasses import dataclass

    import numpy as np
    from tyro.conf import Positional

    from fineweb import tokenise_in_processes
    from lab.data.sources import local_files, open_parquet, units_of
    from lab.data.tokenizers import get_tokenizer

    def set_up():
        global tok
        tok = get_tokenizer("gpt2")

    def obvious(text: str) -> np.ndarray:
        ids = [tok.eot]
        ids.extend(tok.encode(text))
        ids = np.array(ids)
        assert (0 <= ids).all() and (ids < 2**16).all()
        return ids.astype(np.uint16)

    def texts_of(files, column):
        for file in files:
            for batch in open_parquet(file, column).iter_batches(1024, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text and text.strip())

    def run_obvious(files, column, workers):
        with multiprocessing.get_context("spawn").Pool(workers, set_up) as pool:
            yield from pool.imap(obvious, texts_of(files, column), chunksize=1)

    def run_ours(files, column, workers):
        units = (unit for i, file in enumerate(files) for unit in units_of(file, i, column))
        for _, tokens in tokenise_in_processes(units, "gpt2", column, workers):
            yield tokens.ids

    def cpu_seconds():
        """Processor time of this process and of those that it has started and that have ended."""
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    def measure(way, files, column, workers):
        """(tokens, SHA-256 of all ids, seconds, seconds of processor time in all processes)"""
        t0, cpu0, digest, count = time.perf_counter(), cpu_seconds(), hashlib.sha256(), 0
        for ids in way(files, column, workers):
            digest.update(ids.astype("<u2", copy=False).data)
            count += len(ids)
        seconds = time.perf_counter() - t0
        for process in multiprocessing.active_children():
            process.join()
        return count, digest.hexdigest(), seconds, cpu_seconds() - cpu0

    def cost(tokens: float, tok_per_s_per_core: float, cores: int, dollars_per_core_hour: float) -> dict:
        """What `tokens` take: hours on `cores` cores, GB of shards (two bytes a token), dollars of computing."""
        core_hours = tokens / tok_per_s_per_core / 3600
        return {"tokens": tokens, "cores": cores, "hours": core_hours / cores, "disk_gb": 2 * tokens / 1e9,
                "core_hours": core_hours, "dollars": core_hours * dollars_per_core_hour}

    @dataclass
    class Config:
        """Measures tokens per second and core of two ways to tokenise the same parquet files."""

        source: Positional[str]
        """File or folder of parquet."""
        text_column: str = "text"
        """Column that holds the text."""
        workers: int = os.cpu_count() or 1
        """Processes for both ways."""
        passes: int = 3
        """A run reads the files this often."""
        rounds: int = 3
        """Each way runs this often, in turns; the medians count."""
        cores: int = 64
        """Cores of the machine (or cluster) in the table of costs."""
        dollars_per_core_hour: float = 0.05
        """Price of a core in that table: an assumption, put in your own."""
        json: bool = False
        """One line of JSON instead of a table."""

    def main(cfg: Config) -> int:
        if not os.path.exists(cfg.source):
            raise ValueError(f"{cfg.source} does not exist; name a file or folder of parquet")
        files = local_files(cfg.source) * cfg.passes
        if files[0].kind != "parquet":
            raise ValueError(f"{cfg.source} holds {files[0].kind}, wanted are parquet files")
        runs, hashes = {"obvious": [], "ours": []}, set()
        for _ in range(cfg.rounds):
            for name, way in (("obvious", run_obvious), ("ours", run_ours)):
                tokens, digest, *times = measure(way, files, cfg.text_column, cfg.workers)
                runs[name].append(times)
                hashes.add(digest)
        if len(hashes) > 1:
            raise ValueError("the two ways do not give the same bytes: this is a bug in tokenizer.py or sources.py")
        wall, cpu = ({name: tokens / float(np.median([run[i] for run in times])) for name, times in runs.items()}
                     for i in (0, 1))
        rate = {name: wall[name] / cfg.workers for name in runs}
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
        costs = [cost(n, rate["ours"], cfg.cores, cfg.dollars_per_core_hour) for n in (10e9, 100e9, 1.3e12)]
        result = {"tokens": tokens, "workers": cfg.workers, "rounds": cfg.rounds, "passes": cfg.passes,
                  "sha256": digest, "peak_mb": peak, "tok_per_s_per_core": rate, "tok_per_cpu_s": cpu,
                  "ratio": rate["ours"] / rate["obvious"], "cpu_ratio": cpu["ours"] / cpu["obvious"],
                  "runs": runs, "costs": costs}
        if cfg.json:
            print(json.dumps(result))
            return 0
        print(f"{tokens:,} tokens, {cfg.workers} workers, median of {cfg.rounds} rounds, same bytes ({digest[:16]})")
        for name in runs:
            times = ", ".join(f"{dt:.1f}" for dt, _ in runs[name])
            print(f"  {name:8} {rate[name] / 1e6:5.2f}M tok/s per core ({times} s)"
                  f"   {cpu[name] / 1e6:5.2f}M tok per second of processor time")
        print(f"  ratio    {result['ratio']:5.2f}{'':{20 + len(times)}}{result['cpu_ratio']:5.2f}")
        print(f"  largest process {peak:,.0f} MB\n")
        print(f"  at this rate on {cfg.cores} cores, {cfg.dollars_per_core_hour} dollars a core and hour (assumed):")
        for row in costs:
            print(f"  {row['tokens'] / 1e9:6,.0f}B tokens  {row['hours']:6.2f} h  {row['disk_gb']:6,.0f} GB of shards"
                  f"  {row['dollars']:6.2f} dollars")
        return 0

    if __name__ == "__main__":
        import tyro
        try:
            sys.exit(main(tyro.cli(Config)))
        except (ValueError, OSError) as error:
            print(f"bench/tokenize.py: error: {error}", file=sys.stderr)
            sys.exit(2)

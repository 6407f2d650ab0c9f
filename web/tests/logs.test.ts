/** Logs as a terminal and a reader want them: colours, times, all processes by time, what is found. */
import { describe, expect, test, vi } from "vitest";
import { codesAfter, plain, runsOf } from "../src/store/ansi";
import { patternOf, type Span } from "../src/store/find";
import { Listing, Search } from "../src/store/lines";
import { MAX_LINES, merged, ReplicaLog } from "../src/store/logs";

const ESC = "\u001b";

describe("colours", () => {
  test("of a terminal become runs of text", () => {
    const line = `${ESC}[1;31merror${ESC}[0m: no ${ESC}[38;5;2mrows${ESC}[K${ESC}[39m here`;
    expect(plain(line)).toBe("error: no rows here");
    expect(runsOf(line, "").map(({ text, classes }) => [text, classes])).toEqual([
      ["error", "a-red a-bold"],
      [": no ", ""],
      ["rows", "a-green"],
      [" here", ""],
    ]);
    expect(runsOf("x", "38;2;9;31;9")[0]?.classes).toBe(""); // 31 is a part of the colour, not red
  });

  test("go on in the next line until they are reset", () => {
    expect([codesAfter("", `${ESC}[31ma`), codesAfter("31", `${ESC}[1mb`), codesAfter("31;1", `${ESC}[m`)]).toEqual([
      "31",
      "31;1",
      "",
    ]);
    const log = new ReplicaLog();
    log.append(0, `${ESC}[31mTraceback\n  File\n${ESC}[0mdone\n`);
    expect([0, 1, 2].map((line) => log.runs(line).map((run) => run.classes))).toEqual([["a-red"], ["a-red"], [""]]);
    expect(log.lines).toEqual(["Traceback", "  File", "done"]);
  });

  test("are at most a colour and a weight, whatever ends them", () => {
    const line = `${ESC}[32mINFO${ESC}[39m ${ESC}[1mtrainer${ESC}[22m ${ESC}[44;4mx${ESC}[49;24m`;
    let codes = "";
    for (let i = 0; i < 100; i++) codes = codesAfter(codes, line);
    expect(codes).toBe("");
    for (let i = 0; i < 100; i++) codes = codesAfter(codes, `${ESC}[${31 + (i % 7)};4;${1 + (i % 2)};48;5;${i}m`);
    expect(codes).toBe("32;2");
    expect(codesAfter("31;1", `${ESC}[39m`)).toBe("1");
    expect(codesAfter("31;1", `${ESC}[22m`)).toBe("31");
  });

  test("have zeros and other codes among their operands, which are no codes", () => {
    const classesOf = (codes: string) => runsOf(`${ESC}[1m${ESC}[${codes}mx`, "").map((run) => run.classes);
    expect(classesOf("38;2;255;0;0")).toEqual(["a-bold"]); // no reset
    expect(classesOf("38;5;0")).toEqual(["a-black a-bold"]);
    expect(classesOf("22;38;2;0;31;1")).toEqual([""]); // not red and bold
    expect(classesOf("48;5;0;31")).toEqual(["a-red a-bold"]);
    expect(classesOf("48;2;0;31;1")).toEqual(["a-bold"]);
    expect(classesOf("0;32")).toEqual(["a-green"]);
  });

  test("of what was overwritten do not stay, unless they were left on", () => {
    const log = new ReplicaLog();
    log.append(0, `${ESC}[31m10%${ESC}[0m`);
    log.append(log.next, "\r20% done\n");
    log.append(log.next, `${ESC}[33m30%`);
    log.append(log.next, "\r40%\n");
    expect(log.runs(0)).toEqual([{ text: "20% done", classes: "" }]);
    expect(log.runs(1)).toEqual([{ text: "40%", classes: "a-yellow" }]);
  });

  test("of a line that was rewritten are those of what stands", () => {
    const log = new ReplicaLog();
    log.append(0, `${ESC}[33m10 %\r`);
    log.append(log.next, `${ESC}[32m100 %\r\nend\n`);
    expect([log.lines, log.runs(0)]).toEqual([["100 %", "end"], [{ text: "100 %", classes: "a-green" }]]);
  });
});

describe("times", () => {
  test("are of the byte that a line begins with, in pieces and without ASCII", () => {
    const log = new ReplicaLog();
    const piece = "zwölf\nnext\nla"; // bytes 0 to 6, 7 to 11, 12 to 13
    log.append(0, piece, [
      [0, 1000],
      [7, 2000],
      [12, 3000],
    ]);
    log.append(14, "st\nmore\n", [[14, 4000]]);
    expect([log.lines, log.times]).toEqual([
      ["zwölf", "next", "last", "more"],
      [1000, 2000, 3000, 4000],
    ]);
  });

  test("are unknown before the first of them: the log began without times", () => {
    const log = new ReplicaLog();
    log.append(0, "early\nlast\nnew\n", [[11, 5000]]);
    log.append(log.next, "more\n", [[11, 5000]]);
    expect([log.lines, log.times]).toEqual([
      ["early", "last", "new", "more"],
      [0, 0, 5000, 5000],
    ]);
  });

  test("put the lines of all processes into one order", () => {
    const [a, b] = [new ReplicaLog(), new ReplicaLog()];
    a.append(0, "a1\na2\n", [
      [0, 10],
      [3, 30],
    ]);
    b.append(0, "b1\nb2\n", [[0, 20]]);
    const logs = [["a", a] as const, ["b", b] as const];
    const texts = (most?: number) => merged(logs, most).map(({ log, line }) => log.lines[line]);
    expect(texts()).toEqual(["a1", "b1", "b2", "a2"]);
    expect(texts(2)).toEqual(["b2", "a2"]); // the newest
  });
});

describe("what is found", () => {
  test("is a text in any case, or an expression", () => {
    const text = patternOf("No.", "text");
    const expression = patternOf("rank \\d+$", "expression");
    expect(typeof text === "function" && [text("and no."), text("nor")]).toEqual([[4, 7], null]);
    expect(typeof expression === "function" && [expression("Rank 12"), expression("rank 1 of 2")]).toEqual([
      [0, 7],
      null,
    ]);
  });

  test("is nothing where the expression is none, which is said", () => {
    expect(patternOf("(", "expression")).toContain("Unterminated group");
    expect(patternOf("", "expression")).toBeNull();
  });
});

const logOf = (...texts: string[]) => {
  const log = new ReplicaLog();
  log.append(0, texts.map((text) => `${text}\n`).join(""), [[0, 10]]);
  return log;
};

const rank = (line: string): Span => (line.startsWith("rank") ? [0, 4] : null);

describe("lines that are shown", () => {
  test("are counted over all logs, also those that are not listed", () => {
    const many = Array.from({ length: MAX_LINES - 1 }, (_, i) => `line ${i}`);
    const logs = new Map([
      ["a", logOf(...many)],
      ["b", logOf("x", "y", "z")],
    ]);
    const all = new Listing().of(null, logs);
    expect([all.lines.length, all.total]).toEqual([MAX_LINES, MAX_LINES + 2]);
    const one = new Listing().of("b", logs);
    expect([one.lines.map(({ log, line }) => log.lines[line]), one.total]).toEqual([["x", "y", "z"], 3]);
    expect(new Listing().of("none", logs)).toEqual({ lines: [], total: 0 });
  });

  test("are merged again only after a log grew, and searched only where they are new", () => {
    const log = logOf("rank 1", "other");
    const logs = new Map([["a", log]]);
    const listing = new Listing();
    const searched: string[] = [];
    const search = new Search((lines) => {
      searched.push(...lines);
      return lines.map(rank);
    });
    const texts = () => search.among(listing.of(null, logs).lines).map(({ log, line }) => log.lines[line]);
    expect([texts(), texts()]).toEqual([["rank 1"], ["rank 1"]]);
    expect(listing.of(null, logs)).toBe(listing.of(null, logs));
    expect(searched).toEqual(["rank 1", "other"]);
    log.append(log.next, "ra");
    expect(texts()).toEqual(["rank 1"]);
    log.append(log.next, "nk 2\nend\n");
    expect(texts()).toEqual(["rank 1", "rank 2"]);
    expect(searched.slice(2)).toEqual(["ra", "rank 2", "end"]);
  });

  test("are found although older ones were dropped", () => {
    const log = logOf("rank 1", "other", "rank 2");
    const logs = new Map([["a", log]]);
    const listing = new Listing();
    const search = new Search((lines) => lines.map(rank));
    const numbers = () => search.among(listing.of("a", logs).lines).map(({ line }) => line);
    expect(numbers()).toEqual([0, 2]);
    log.append(log.next, "more\n".repeat(MAX_LINES - 2)); // the first line is dropped
    expect([log.dropped, numbers()]).toEqual([1, [1]]);
  });
});

describe("lines that a worker searches", () => {
  test("come later, also those that arrive or are dropped while it searches", async () => {
    const log = logOf("rank 0", "rank 1", "other");
    const logs = new Map([["a", log]]);
    const listing = new Listing();
    const waiting: (() => void)[] = [];
    const search = new Search((lines) => new Promise((resolve) => waiting.push(() => resolve(lines.map(rank)))));
    const texts = () => search.among(listing.of("a", logs).lines).map(({ log, line }) => log.lines[line]);
    const answered = async () => {
      const changed = new Promise<void>((resolve) => {
        const before = search.version.value;
        search.version.subscribe((now) => now > before && resolve());
      });
      waiting.shift()?.();
      await changed;
    };
    expect(texts()).toEqual([]);
    log.append(log.next, `${"more\n".repeat(MAX_LINES - 3)}rank 2\n`); // the first line is dropped
    expect([texts(), waiting.length, log.dropped]).toEqual([[], 1, 1]);
    await answered();
    expect(texts()).toEqual(["rank 1"]);
    await answered();
    expect([texts(), waiting.length]).toEqual([["rank 1", "rank 2"], 0]);
  });

  test("are none after a search that failed, which is not repeated", async () => {
    let asked = 0;
    const search = new Search(() => {
      asked += 1;
      return Promise.reject(new Error("takes too long"));
    });
    const all = new Listing().of(null, new Map([["a", logOf("x")]])).lines;
    expect(search.among(all)).toEqual([]);
    await vi.waitFor(() => expect(search.error).toBe("takes too long"));
    expect([search.among(all), asked]).toEqual([[], 1]);
  });
});

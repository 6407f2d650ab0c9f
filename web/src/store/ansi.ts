/** Colours of a terminal in a line of a log: runs of text with the style that stood when they were written. Pure. */

export interface Run {
  readonly text: string;
  /** Classes of the style sheet: `a-red`, `a-bold`; empty for plain text. */
  readonly classes: string;
}

// biome-ignore lint/suspicious/noControlCharactersInRegex: terminal codes start with the control character ESC
const CODE = /\u001b\[([0-9;?]*)([A-Za-z])/g;
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"] as const;

export const plain = (line: string): string => line.replace(CODE, "");
export const hasCodes = (line: string): boolean => line.includes("\u001b[");

/** The codes that hold after a line that began with `codes`: "1;31" is bold red. */
export function codesAfter(codes: string, line: string): string {
  let now = codes;
  for (const [, numbers, letter] of line.matchAll(CODE)) if (letter === "m") now = joined(now, numbers ?? "");
  return now;
}

function joined(codes: string, more: string): string {
  const all = more === "" ? ["0"] : more.split(";");
  const reset = all.findLastIndex((code) => Number(code) === 0);
  const fresh = all.slice(reset + 1).join(";");
  if (reset >= 0) return fresh;
  return codes === "" ? fresh : `${codes};${fresh}`;
}

export function runsOf(line: string, codes: string): Run[] {
  const runs: Run[] = [];
  let [now, at] = [codes, 0];
  for (const found of line.matchAll(CODE)) {
    if (found.index > at) runs.push({ text: line.slice(at, found.index), classes: classesOf(now) });
    at = found.index + found[0].length;
    if (found[2] === "m") now = joined(now, found[1] ?? "");
  }
  if (at < line.length) runs.push({ text: line.slice(at), classes: classesOf(now) });
  return runs;
}

const WEIGHTS: Readonly<Record<number, string>> = { 1: "bold", 2: "faint", 22: "" };

/** The colour that a code sets; undefined: it sets none. */
function colourOf(code: number): string | undefined {
  if (code === 39) return "";
  const place = code >= 90 ? code - 90 : code - 30;
  return place >= 0 && place < COLOURS.length ? COLOURS[place] : undefined;
}

/** Sixteen colours, bold and faint; of 256 or all colours only the first sixteen have a class. */
function classesOf(codes: string): string {
  let [colour, weight] = ["", ""];
  const all = codes.split(";").map(Number);
  for (let i = 0; i < all.length; i++) {
    const code = all[i] ?? 0;
    if (code === 38) colour = all[i + 1] === 5 ? indexed(all[i + 2] ?? 16) : "";
    // What follows is the colour itself: its number, or red, green and blue.
    if (code === 38 || code === 48) i += all[i + 1] === 5 ? 2 : 4;
    else [colour, weight] = [colourOf(code) ?? colour, WEIGHTS[code] ?? weight];
  }
  return [colour, weight].flatMap((one) => (one === "" ? [] : [`a-${one}`])).join(" ");
}

const indexed = (number: number): string => (number < 16 ? (COLOURS[number % 8] ?? "") : "");

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

/** The codes that hold after a line that began with `codes`, reduced to a colour and a weight: "31;1" is bold red. */
export function codesAfter(codes: string, line: string): string {
  let now = codes;
  for (const [, operands, letter] of line.matchAll(CODE)) if (letter === "m") now = joined(now, operands ?? "");
  return now;
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

interface Style {
  /** Code of one of eight colours, 30 to 37; 0: that of plain text. */
  readonly colour: number;
  /** 1: bold, 2: faint, 0: neither. */
  readonly weight: number;
}

const PLAIN: Style = { colour: 0, weight: 0 };

/** At most two codes, however many were sent, and none after a reset: what a log retains for each line is bounded. */
function joined(codes: string, operands: string): string {
  const { colour, weight } = styleAfter(styleAfter(PLAIN, codes), operands === "" ? "0" : operands);
  return [colour, weight].filter((code) => code !== 0).join(";");
}

/** Sixteen colours, bold and faint; of 256 or all colours only the first sixteen have a class. */
function styleAfter(style: Style, operands: string): Style {
  if (operands === "") return style;
  let { colour, weight } = style;
  const all = operands.split(";").map(Number);
  for (let i = 0; i < all.length; i++) {
    const code = all[i] ?? 0;
    if (code === 38) colour = all[i + 1] === 5 ? indexed(all[i + 2] ?? 16) : 0;
    // What follows is the colour itself, of the text or behind it: its number, or red, green and blue.
    if (code === 38 || code === 48) i += OPERANDS[all[i + 1] ?? 0] ?? 0;
    else [colour, weight] = [colourOf(code) ?? colour, weightOf(code) ?? weight];
  }
  return { colour, weight };
}

/** Operands behind 38 and 48, by the first of them. */
const OPERANDS: Readonly<Record<number, number>> = { 5: 2, 2: 4 };

/** The colour that a code sets; undefined: it sets none. */
function colourOf(code: number): number | undefined {
  if (code === 0 || code === 39) return 0;
  const place = code >= 90 ? code - 90 : code - 30;
  return place >= 0 && place < COLOURS.length ? 30 + place : undefined;
}

function weightOf(code: number): number | undefined {
  if (code === 0 || code === 22) return 0;
  return code === 1 || code === 2 ? code : undefined;
}

const indexed = (number: number): number => (number < 16 ? 30 + (number % 8) : 0);

function classesOf(codes: string): string {
  const { colour, weight } = styleAfter(PLAIN, codes);
  return [COLOURS[colour - 30] ?? "", weight === 0 ? "" : weight === 1 ? "bold" : "faint"]
    .flatMap((one) => (one === "" ? [] : [`a-${one}`]))
    .join(" ");
}

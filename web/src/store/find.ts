/** What to find in lines: a text whatever its case, or a regular expression. Pure. */

/** Begin and end within a line; null: the line does not have it. */
export type Span = readonly [number, number] | null;
export type Pattern = (line: string) => Span;

/** Where a line has it first (begin, end). Null: there is nothing to find; a text: why the expression is none. */
export function patternOf(text: string, how: "text" | "expression"): Pattern | string | null {
  if (text === "") return null;
  if (how === "text") {
    const needle = text.toLowerCase();
    return (line) => {
      const at = line.toLowerCase().indexOf(needle);
      return at < 0 ? null : [at, at + needle.length];
    };
  }
  let expression: RegExp;
  try {
    expression = new RegExp(text, "i");
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return error.message.replace(/^Invalid regular expression: /, "");
  }
  return (line) => {
    const found = expression.exec(line);
    return found === null ? null : [found.index, found.index + found[0].length];
  };
}

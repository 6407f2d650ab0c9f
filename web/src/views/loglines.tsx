/** Lines of logs in the order that they are shown in, one row of them, and the text of their file. */
import { clockMs } from "../format";
import { plain } from "../store/ansi";
import type { Span } from "../store/find";
import type { LineOf, ReplicaLog } from "../store/logs";
import type { Replica } from "../types";

export const ROW_PX = 18;

export const nameOf = (replica: Replica): string => `${replica.role}-${replica.index}`;

/** As a file: of several processes with time and name before each line. */
export function textOf(lines: readonly LineOf[], names: ReadonlyMap<string, string> | null): string {
  return lines
    .map(({ log, replicaId, line }) => {
      const text = plain(log.lines[line] ?? "");
      const time = log.times[line] ?? 0;
      return names === null
        ? `${text}\n`
        : `${time > 0 ? new Date(time).toISOString() : "-"} ${names.get(replicaId) ?? replicaId} ${text}\n`;
    })
    .join("");
}

interface RowProps {
  readonly index: number;
  readonly at: LineOf;
  readonly isAt: boolean;
  readonly found: Span;
  /** The process's name and its colour; null where all lines are of one. */
  readonly who: { readonly name: string; readonly tone: number } | null;
}

export function LogRow({ index, at, isAt, found, who }: RowProps) {
  const { log, line } = at;
  const time = log.times[line] ?? 0;
  return (
    <div
      class={isAt ? "logline is-at" : "logline"}
      style={{ top: `${index * ROW_PX}px` }}
      data-testid="log-line"
      title={time > 0 ? `${clockMs(time)}, when it reached the server` : undefined}
    >
      {who === null ? (
        <span class="no" aria-hidden="true">
          {line + 1 + log.dropped}
        </span>
      ) : (
        <>
          <span class="at">{time > 0 ? clockMs(time) : "–"}</span>
          <span class={`who who-${who.tone}`}>{who.name}</span>
        </>
      )}
      <Coloured log={log} line={line} found={found} />
    </div>
  );
}

/** The line's colours; what was found is marked across them. */
function Coloured({ log, line, found }: { log: ReplicaLog; line: number; found: Span }) {
  let at = 0;
  return (
    <>
      {log.runs(line).map(({ text, classes }, index) => {
        const from = at;
        at += text.length;
        const [begin, end] = found === null ? [0, 0] : [clamp(found[0] - from, text), clamp(found[1] - from, text)];
        return (
          <span key={index} class={classes}>
            {text.slice(0, begin)}
            {end > begin && <mark>{text.slice(begin, end)}</mark>}
            {text.slice(Math.max(begin, end))}
          </span>
        );
      })}
    </>
  );
}

const clamp = (at: number, text: string): number => Math.max(0, Math.min(text.length, at));

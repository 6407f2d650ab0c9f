/** A curve as wide as a word, beside the number that it leads to. */

const [WIDTH, HEIGHT, EDGE] = [72, 18, 2];

interface Props {
  /** Places from left to right, ascending, and the value at each. */
  readonly at: readonly number[];
  readonly values: readonly number[];
  readonly label: string;
  /** What the lower and the upper edge stand for; by default the least and the greatest value. */
  readonly bounds?: readonly [number, number];
}

/** Points of a polyline; "" where fewer than two values are numbers. A curve of equal values lies in the middle. */
export function lineOf({ at, values, bounds }: Omit<Props, "label">): string {
  const some = values.flatMap((value, i) => (Number.isFinite(value) ? [[at[i] ?? i, value] as const] : []));
  const [first, last] = [some[0], some[some.length - 1]];
  if (first === undefined || last === undefined || some.length < 2) return "";
  const low = bounds?.[0] ?? some.reduce((least, [, value]) => Math.min(least, value), first[1]);
  const high = bounds?.[1] ?? some.reduce((most, [, value]) => Math.max(most, value), first[1]);
  const share = (value: number, from: number, to: number) => (to > from ? (value - from) / (to - from) : 0.5);
  const x = (place: number) => EDGE + share(place, first[0], last[0]) * (WIDTH - 2 * EDGE);
  const y = (value: number) =>
    HEIGHT - EDGE - share(Math.min(high, Math.max(low, value)), low, high) * (HEIGHT - 2 * EDGE);
  return some.map(([place, value]) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
}

export function Sparkline({ label, ...curve }: Props) {
  const points = lineOf(curve);
  if (points === "") return <span class="course" />;
  return (
    <svg class="course" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label} data-testid="spark">
      <polyline points={points} />
    </svg>
  );
}

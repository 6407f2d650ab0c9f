/** Bins of busy time for a timeline that is looked at from afar, against sums of the slices themselves. */
import { describe, expect, test, vi } from "vitest";
import { BUCKETS, bucketOf } from "../src/graph/group";
import { BYTES_A_SLICE, columnOf, LEAST_SLICES, levelAt, levelsOf, NUM_ROLES } from "../src/timeline/levels";
import type { Lane } from "../src/timeline/model";
import { paintTimeline, type TimelineScene } from "../src/timeline/paint";
import type { GraphDocument, GraphOp } from "../src/types";

// What the session's settings are read from when the module is loaded.
vi.hoisted(() => {
  const nothing = { matches: false, addEventListener: () => {}, getItem: () => null };
  const document = { documentElement: { dataset: {} }, hidden: true };
  Object.assign(globalThis, { matchMedia: () => nothing, localStorage: nothing, document });
});

const ROLES = ["forward", "backward", "optimize", "communication", "input"];
const ops = ROLES.map(
  (role, i) => ({ name: `op${i}`, type: "relu", role, module: "", replica: 0 }) as unknown as GraphOp,
);
const DOCUMENT = { ops, edges: [] } as unknown as GraphDocument;

/** Numbers in [0, 1) that look random, the same in each run. */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1_664_525 + 1_013_904_223) % 2 ** 32;
    return state / 2 ** 32;
  };
}

/** Slices one after another, with pauses; `burst`: many without, then a long pause. Whole nanoseconds: sums are exact. */
function lane(seed: number, count: number, burst = false): Lane {
  const random = numbers(seed);
  const [start, duration, op] = [new Float64Array(count), new Float64Array(count), new Int32Array(count)];
  let at = Math.round(random() * 1e6);
  for (let i = 0; i < count; i++) {
    const isLong = random() < 0.001;
    start[i] = at;
    duration[i] = Math.round(random() * (isLong ? 4e6 : 2e4));
    op[i] = Math.floor(random() * ops.length);
    at += (duration[i] ?? 0) + Math.round(burst && i % 1000 !== 0 ? 0 : random() * (burst ? 1e9 : 1e4));
  }
  const named = { label: "t0", key: "trainer-0.0", pinned: false, place: 0, stream: 0, thread: 0 };
  return { ...named, start, duration, op, document: DOCUMENT, shown: null };
}

/** Nanoseconds of each role between two times, from the slices. */
function exact(of: Lane, from: number, to: number): number[] {
  const sums = new Array<number>(NUM_ROLES).fill(0);
  of.start.forEach((begin, i) => {
    const within = Math.min(to, begin + (of.duration[i] ?? 0)) - Math.max(from, begin);
    const role = BUCKETS.indexOf(bucketOf(ops[of.op[i] ?? 0] as GraphOp));
    if (within > 0) sums[role] = (sums[role] ?? 0) + within;
  });
  return sums;
}

describe.each([
  [1, false],
  [2, false],
  [3, true],
] as const)("lane %i", (seed, burst) => {
  const of = lane(seed, LEAST_SLICES, burst);
  const levels = levelsOf(of);

  test("bins hold the time of their slices at every level", () => {
    expect(levels?.levels.length).toBeGreaterThan(5);
    const random = numbers(seed);
    for (const { binNs, busyNs } of levels?.levels ?? []) {
      const bins = busyNs.length / NUM_ROLES;
      for (const bin of [0, bins - 1, Math.floor(random() * bins), Math.floor(random() * bins)]) {
        const from = (levels?.originNs ?? 0) + bin * binNs;
        const held = [...busyNs.subarray(bin * NUM_ROLES, (bin + 1) * NUM_ROLES)];
        expect(held).toEqual(exact(of, from, from + binNs));
      }
    }
  });

  test("levels halve their bins, and take a bounded number of bytes", () => {
    const sizes = levels?.levels.map(({ busyNs }) => busyNs.length / NUM_ROLES) ?? [];
    sizes.slice(1).forEach((size, i) => void expect(size).toBe(Math.ceil((sizes[i] ?? 0) / 2)));
    expect(sizes.at(-1)).toBe(1);
    const bytes = sizes.reduce((sum, size) => sum + size * NUM_ROLES * 8, 0);
    expect(bytes).toBeLessThan(BYTES_A_SLICE * of.start.length + 64 * NUM_ROLES * 8);
  });

  test("a pixel has the role that takes most of its time", () => {
    const level = levels === null ? null : levelAt(levels, 2 ** 24);
    if (level === null || levels === null) throw new Error("no level for this zoom");
    expect(level.binNs).toBeLessThanOrEqual(2 ** 24);
    for (const first of [0, 3]) {
      const from = levels.originNs + first * level.binNs;
      const sums = exact(of, from, from + 2 * level.binNs);
      const { role, share } = columnOf(level, first, first + 2);
      expect(role).toBe(Math.max(...sums) === 0 ? -1 : sums.indexOf(Math.max(...sums)));
      expect(share).toBeCloseTo(Math.min(1, sums.reduce((a, b) => a + b) / (2 * level.binNs)), 12);
    }
  });
});

test("short lanes and near looks are painted slice by slice", () => {
  expect(levelsOf(lane(1, LEAST_SLICES - 1))).toBeNull();
  const levels = levelsOf(lane(1, LEAST_SLICES));
  const finest = levels?.levels[0];
  if (levels === null || finest === undefined) throw new Error("no levels");
  expect(levelAt(levels, finest.binNs * 0.99)).toBeNull();
  expect(levelAt(levels, finest.binNs)).toBe(finest);
});

test("a lane from afar reads no more slices than it has pixels", () => {
  const of = lane(4, 4 * LEAST_SLICES);
  levelsOf(of);
  let reads = 0;
  const counted = new Proxy(of.duration, {
    get: (target, name) => {
      if (typeof name === "string" && /^\d+$/.test(name)) reads += 1;
      return Reflect.get(target, name);
    },
  });
  const canvas = new Proxy({}, { get: () => () => ({ width: 0 }), set: () => true }) as CanvasRenderingContext2D;
  const palette = new Proxy({}, { get: (_, name) => (name === "bucket" ? palette : "#112233") }) as never;
  const to = (of.start.at(-1) ?? 0) + 1;
  const model = { lanes: [{ ...of, duration: counted }] } as unknown as TimelineScene["model"];
  const still = { palette, left: 164, hover: null, measured: null, critical: new Set<number>() };
  const drawn = paintTimeline(canvas, 1164, 200, { ...still, model, from: 0, to, selectedOps: new Set() });
  expect(drawn).toBe(of.start.length);
  expect(reads).toBeLessThan(1000);
});

test("operators of the critical path are underlined from afar, too, where they are wide", () => {
  const of = lane(5, LEAST_SLICES);
  const levels = levelsOf(of);
  const finest = levels?.levels[0]?.binNs ?? 0;
  const wide = of.duration.findIndex((ns, i) => ns > 2 * finest && !levels?.long.includes(i));
  if (levels === null || finest === 0 || wide < 0) throw new Error("no levels, or no slice of some bins");
  const at = of.start[wide] ?? 0;
  const underlined: string[] = [];
  const context: Record<string, unknown> = {};
  const canvas = new Proxy(context, {
    get: (_, name) => (name === "fillRect" ? () => underlined.push(`${context.fillStyle}`) : () => ({ width: 0 })),
  }) as unknown as CanvasRenderingContext2D;
  const colours = new Proxy({}, { get: (_, name) => (name === "bucket" ? colours : "#112233") }) as object;
  const palette = new Proxy({}, { get: (_, name) => (name === "critical" ? "CRITICAL" : Reflect.get(colours, name)) });
  const model = { lanes: [of] } as unknown as TimelineScene["model"];
  const rest = { palette: palette as never, left: 164, hover: null, measured: null, selectedOps: new Set<number>() };
  for (const critical of [new Set<number>(), new Set([of.op[wide] ?? -1])]) {
    underlined.length = 0;
    paintTimeline(canvas, 1164, 200, { ...rest, model, from: at, to: at + 1000 * finest, critical });
    expect(underlined).toEqual(
      critical.size > 0 ? expect.arrayContaining(["CRITICAL"]) : expect.not.arrayContaining(["CRITICAL"]),
    );
  }
});

/** Charts of metrics, and what they share: crosshair, zoom and colours. What draws them is a script that comes later. */
import { signal } from "@preact/signals";
import { elapsed, integer } from "../format";
import type { Palette } from "../palette";
import { setQuery } from "../router";
import type { Axis } from "../store/curves";
import type { JobStore } from "../store/job";
import { type FrameProps, later } from "./later";

export type Colour = "accent" | "forward" | "communication" | "optimize" | "backward";

export interface ChartProps {
  readonly store: JobStore;
  /** What is measured; series of several trainers have one chart. */
  readonly base: string;
  readonly height: number;
  readonly colour?: Colour;
  readonly compact?: boolean;
  readonly look?: Look;
}

/** How curves are drawn. `smoothing`: weight of what was before, 0 for none; `log`: whether the axis of values is. */
export interface Look {
  readonly smoothing: number;
  readonly log: boolean;
  readonly axis: Axis;
}

export const PLAIN: Look = { smoothing: 0, log: false, axis: "step" };

/** The step or time under the pointer, in whichever chart it is. */
export const crosshair = signal<number | null>(null);

/** Have all charts of an axis show all again. */
export const zoomOut = (axis: Axis): void => setQuery(axis === "time" ? { zoom: null } : { step: null, span: null });

/** A step or a time as an axis has it. */
export const position = (axis: Axis, at: number): string => (axis === "time" ? elapsed(at) : integer(at));

/** Colours of the curves of a chart: the metric's own; of several trainers, each has the same in every chart. */
export function coloursOf(palette: Palette, own: Colour, count: number): readonly string[] {
  if (count <= 1) return [own === "accent" ? palette.accent : palette.bucket[own]];
  const { communication, backward, optimize, input } = palette.bucket;
  return [palette.accent, communication, backward, optimize, palette.bad, input];
}

/** As high as the chart will be. */
function Room({ view, isBusy, children }: FrameProps<ChartProps>) {
  return (
    <div style={{ height: `${view.height}px`, overflow: "auto" }} aria-busy={isBusy}>
      {isBusy ? null : children}
    </div>
  );
}

export const Chart = later<ChartProps>(async () => (await import("./plot")).Plot, Room);

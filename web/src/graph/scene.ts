/** What the painters of a graph share: the scene, and which level of detail a scale has. */
import type { Palette } from "../palette";
import type { CriticalPath } from "./critical";
import type { Box, Layout } from "./layout";
import type { Tints } from "./tints";
import type { UsedBoxes } from "./uses";

export interface Camera {
  readonly x: number;
  readonly y: number;
  readonly scale: number;
}

export interface Scene {
  readonly layout: Layout;
  readonly camera: Camera;
  readonly palette: Palette;
  readonly critical: CriticalPath;
  readonly criticalEdges: ReadonlySet<number>;
  readonly selected: number;
  readonly hovered: number;
  /** Around the selected operator, if one is selected. */
  readonly used: UsedBoxes;
  /** Share of the step's operator time that a box took; NaN before anything was measured. */
  readonly share: Float64Array;
  readonly maxShare: number;
  readonly tints: Tints;
  /** 0 … 1 by box: how lit it is in this animation frame. */
  readonly glow: Float64Array;
}

/** Operators inside a group are drawn from this height on the screen; below it the group is a block. */
const MIN_OP_PX = 6;
const OP_H = 30;

export const showsOps = (scale: number): boolean => OP_H * scale >= MIN_OP_PX;
/** Whether a box is drawn at all at this scale. */
export const isDrawn = (box: Box, scale: number): boolean => box.depth === 0 || showsOps(scale);
/** A frame whose operators are too small to be drawn looks like a group that is not expanded. */
export const isOpen = (box: Box, scale: number): boolean => box.expanded && showsOps(scale);

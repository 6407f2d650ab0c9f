/**
 * What draws a chart: one metric of all trainers, by uPlot. Its points are given to uPlot inside an animation frame, so a hidden tab
 * draws none. A zoom stays as points arrive, and is that of all charts beside it, as the crosshair is.
 */
import { useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { tick } from "../format";
import { addPainter, invalidate, type Painter } from "../frameloop";
import { alpha, palette } from "../palette";
import { setQuery, url } from "../router";
import { zoomFields, zoomOf } from "../store/brush";
import { type Axis, aboveZero, type Column, type Curve, curvesOf, joined, smoothed } from "../store/curves";
import { theme } from "../store/session";
import { coloursOf, crosshair, type Look, PLAIN, type ChartProps as Props, position, zoomOut } from "./chart";

const SPARSE_POINTS = 60;
const SYNC_KEY = "charts by ";
/** Ticks of time: parts and multiples of minutes and hours. */
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
const INCREMENTS = [...SECONDS, ...[2, 5, 10, 20, 50].map((days) => days * 86400)];
/** More curves than colours: those that follow are drawn with dashes, then with dots. */
const dashOf = (index: number, colours: number): number[] =>
  [[], [7, 4], [2, 3], [10, 3, 2, 3]][Math.floor(index / colours)] ?? [];

function options(props: Props, width: number, curves: readonly Curve[]): uPlot.Options {
  const colours = palette();
  const strokes = coloursOf(colours, props.colour ?? "accent", curves.length);
  const axis: uPlot.Axis = {
    stroke: colours.muted,
    font: `11px ${colours.sans}`,
    grid: { stroke: colours.line, width: 1 },
    ticks: { show: false },
  };
  const small = props.compact === true;
  const look = props.look ?? PLAIN;
  const isSmooth = look.smoothing > 0;
  return {
    width,
    height: props.height,
    legend: { show: false },
    padding: small ? [6, 4, 4, 4] : [8, 22, 0, 0],
    cursor: {
      drag: { x: !small, y: false, setScale: false },
      points: { size: 6 },
      sync: { key: `${SYNC_KEY}${look.axis}`, setSeries: false },
    },
    scales: {
      x: { time: false },
      y: look.log ? { distr: 3 } : { range: (_, low, high) => rangeOf(props.base, low, high) },
    },
    axes: [
      {
        ...axis,
        show: !small,
        size: 26,
        ...(look.axis === "time" ? { incrs: INCREMENTS } : {}),
        values: (_, ticks) =>
          ticks.map((at) => (look.axis === "time" || Number.isInteger(at) ? position(look.axis, at) : "")),
      },
      { ...axis, show: !small, size: 50, values: (_, ticks) => ticks.map(tick) },
    ],
    series: [
      {},
      ...[...curves, ...(isSmooth ? curves : [])].map((_, index) => {
        const isFaint = isSmooth && index < curves.length;
        const stroke = strokes[(index % curves.length) % strokes.length] ?? colours.accent;
        const fill = curves.length === 1 && !isSmooth && !look.log ? { fill: alpha(stroke, 0.07) } : {};
        return {
          stroke: isFaint ? alpha(stroke, 0.28) : stroke,
          dash: dashOf(index % curves.length, strokes.length),
          width: 1.5,
          spanGaps: false,
          ...fill,
          points: { show: (plot: uPlot) => !isFaint && plot.data[0].length <= SPARSE_POINTS, size: 5, fill: stroke },
        };
      }),
    ],
    hooks: { setCursor: [pointed], setSelect: [(plot) => selected(plot, look.axis)] },
  };
}

function pointed(plot: uPlot): void {
  const index = plot.cursor.idx;
  crosshair.value = index == null || (plot.cursor.left ?? -1) < 0 ? null : (plot.data[0][index] ?? null);
}

function selected(plot: uPlot, axis: Axis): void {
  if (plot.select.width < 3) return;
  const [from, to] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (to > from) setQuery(zoomFields(axis, from, to));
}

/** Rates and durations are read against zero; a loss or a score against its own spread. */
function rangeOf(name: string, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const fromZero = /_per_s$|_ms$|_bytes$/.test(name) && low >= 0;
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  return [fromZero ? 0 : low - pad, high + pad];
}

/** Curves of a chart; a small one has those of its job alone. */
const shownCurves = (props: Props): Curve[] =>
  curvesOf(props.store.series, props.compact === true ? [] : props.store.others.shown()).get(props.base) ?? [];

/** As they are, or each smoothed behind all of them as they are. */
function columnsOf(curves: readonly Curve[], look: Look): [number[], ...Column[]] {
  const [steps, ...columns] = joined(curves, look.axis);
  const means = look.smoothing > 0 ? columns.map((column) => smoothed(column, look.smoothing)) : [];
  const drawn = [...columns, ...means];
  return [steps, ...(look.log ? drawn.map(aboveZero) : drawn)];
}

/** Give uPlot all points, and the steps or times that are zoomed to. */
function show(plot: uPlot, curves: readonly Curve[], look: Look): void {
  plot.batch(() => {
    const columns = columnsOf(curves, look);
    // One that is gone has its line until the chart is made anew.
    const empty = new Array<undefined>(columns[0].length).fill(undefined);
    while (columns.length < plot.series.length) columns.push(empty);
    plot.setData(columns as uPlot.AlignedData, false);
    const steps = plot.data[0];
    const zoom = zoomOf(url.value.searchParams, look.axis);
    const [min, max] = zoom ?? [steps[0] ?? 0, steps[steps.length - 1] ?? 1];
    plot.setScale("x", { min, max: max > min ? max : min + 1 });
  });
}

export function Plot(props: Props) {
  const host = useRef<HTMLDivElement>(null);
  const painter = useRef<Painter | null>(null);
  const shownTheme = theme.value;
  props.store.metricsVersion.value;
  const look = props.look ?? PLAIN;
  const curves = shownCurves(props);
  useEffect(() => {
    const element = host.current;
    if (element === null) return;
    const drawn = look.smoothing > 0 ? [...curves, ...curves] : curves;
    const plot = new uPlot(options(props, element.clientWidth, curves), [[], ...drawn.map(() => [])], element);
    const paint: Painter = () => {
      // A curve that came since has its line when the chart is made anew.
      show(plot, shownCurves(props).slice(0, curves.length), look);
      return "done";
    };
    painter.current = paint;
    const remove = addPainter(paint);
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: props.height }));
    observer.observe(element);
    const showAll = () => zoomOut(look.axis);
    element.addEventListener("dblclick", showAll);
    return () => {
      element.removeEventListener("dblclick", showAll);
      remove();
      observer.disconnect();
      plot.destroy();
    };
    // The theme is read when the chart is made, so a new theme makes a new chart; so does a trainer that joins.
  }, [props.store, props.base, props.height, shownTheme, curves.length, look.smoothing, look.log, look.axis]);
  useSignalEffect(() => {
    props.store.metricsVersion.value;
    props.store.others.version.value;
    url.value;
    if (painter.current !== null) invalidate(painter.current);
  });
  return (
    <div
      ref={host}
      role="img"
      aria-label={`${props.base} over ${look.axis === "time" ? "time" : "steps"}`}
      data-testid={`chart-${props.base}`}
    />
  );
}

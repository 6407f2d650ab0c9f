/** One metric as a uPlot chart. Its points are given to uPlot inside an animation frame, so a hidden tab draws none. */
import { useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { integer, tick } from "../format";
import { addPainter, invalidate, type Painter } from "../frameloop";
import { alpha, palette } from "../palette";
import type { JobStore } from "../store/job";
import { theme } from "../store/session";

interface Props {
  readonly store: JobStore;
  readonly name: string;
  readonly height: number;
  readonly colour?: "accent" | "forward" | "communication" | "optimize" | "backward";
  readonly compact?: boolean;
}

const SPARSE_POINTS = 60;

function options(props: Props, width: number): uPlot.Options {
  const colours = palette();
  const key = props.colour ?? "accent";
  const stroke = key === "accent" ? colours.accent : colours.bucket[key];
  const axis: uPlot.Axis = {
    stroke: colours.muted,
    font: `11px ${colours.sans}`,
    grid: { stroke: colours.line, width: 1 },
    ticks: { show: false },
  };
  const small = props.compact === true;
  return {
    width,
    height: props.height,
    legend: { show: false },
    padding: small ? [6, 4, 4, 4] : [8, 22, 0, 0],
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(props.name, low, high) } },
    axes: [
      {
        ...axis,
        show: !small,
        size: 26,
        values: (_, ticks) => ticks.map((at) => (Number.isInteger(at) ? integer(at) : "")),
      },
      { ...axis, show: !small, size: 50, values: (_, ticks) => ticks.map(tick) },
    ],
    series: [
      {},
      {
        stroke,
        width: 1.5,
        fill: alpha(stroke, 0.07),
        points: { show: (plot) => plot.data[0].length <= SPARSE_POINTS, size: 5, fill: stroke },
      },
    ],
  };
}

/** Rates and durations are read against zero; a loss or a score against its own spread. */
function rangeOf(name: string, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const fromZero = /_per_s$|_ms$|_bytes$/.test(name) && low >= 0;
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  return [fromZero ? 0 : low - pad, high + pad];
}

export function Chart(props: Props) {
  const host = useRef<HTMLDivElement>(null);
  const painter = useRef<Painter | null>(null);
  const shownTheme = theme.value;
  useEffect(() => {
    const element = host.current;
    if (element === null) return;
    const plot = new uPlot(options(props, element.clientWidth), [[], []], element);
    const paint: Painter = () => {
      const series = props.store.series.byName.get(props.name);
      if (series !== undefined) plot.setData([...series.bySteps()]);
      return "done";
    };
    painter.current = paint;
    const remove = addPainter(paint);
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: props.height }));
    observer.observe(element);
    return () => {
      remove();
      observer.disconnect();
      plot.destroy();
    };
    // The theme is read when the chart is made, so a new theme makes a new chart.
  }, [props.store, props.name, props.height, shownTheme]);
  useSignalEffect(() => {
    props.store.metricsVersion.value;
    if (painter.current !== null) invalidate(painter.current);
  });
  return <div ref={host} role="img" aria-label={`${props.name} over steps`} data-testid={`chart-${props.name}`} />;
}

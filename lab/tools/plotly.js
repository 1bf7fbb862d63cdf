// plotly.js: shared by the pages that draw with plotly, which is in the page, compressed
async function load_plotly() {  // a script element with this script's nonce, which the policy allows
  const bytes = Uint8Array.from(atob($("plotly").textContent), one => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = Object.assign(document.createElement("script"), { nonce });
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}
const nonce = document.currentScript.nonce;

function template() {  // the style of all figures
  const line = { gridcolor: css("faint"), linecolor: css("faint"), zeroline: false, automargin: true, exponentformat: "B",
                 title: { standoff: 8 } };
  return { layout: {
    paper_bgcolor: css("paper"), plot_bgcolor: css("paper"), font: { color: css("ink"), size: 12 }, xaxis: line, yaxis: line,
    hoverlabel: { bgcolor: css("card"), bordercolor: css("faint"), font: { color: css("ink") }, namelength: -1 },
    shapedefaults: { type: "line", xref: "paper", x0: 0, x1: 1, layer: "above", line: { color: css("soft"), width: 1, dash: "dash" },
                     label: { textposition: "end", yanchor: "bottom", font: { size: 11, color: css("soft") } } } } };
}

// Draws the charts, gives them the colours of the page, and says so in <html data-charts>.
(function () {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function paint() {
    const style = getComputedStyle(document.documentElement);
    for (const doc of Bokeh.documents) {
      for (const model of doc._all_models.values()) {
        const values = {};
        for (const tag of model.tags || []) {
          const [name, variable] = String(tag).split("=--");
          if (variable === undefined) continue;
          const color = style.getPropertyValue("--" + variable).trim();
          const property = model.properties[name];
          // Of a glyph it is a value or a field; of anything else a plain color.
          const plain = property.attr === undefined || typeof model[name] === "string" || model[name] === null;
          values[name] = plain ? color : { value: color };
        }
        if (Object.keys(values).length) model.setv(values);
      }
    }
  }

  // Dates are wide: fewer of them where there is little room.
  function fit() {
    for (const doc of Bokeh.documents) {
      for (const model of doc._all_models.values()) {
        if (model.type === "DatetimeTicker") model.desired_num_ticks = window.innerWidth < 700 ? 4 : 6;
      }
    }
  }

  function drawn() {
    // After the frames in which the charts take on their colors.
    setTimeout(function () {
      document.documentElement.dataset.charts = document.querySelectorAll("[data-root-id]").length;
    }, 200);
  }

  const items = JSON.parse(document.getElementById("charts").textContent);
  if (items.roots.length) {
    Bokeh.embed.embed_items(items.docs, items.render).then(function () {
      paint();
      fit();
      window.addEventListener("resize", fit);
      dark.addEventListener("change", paint);
      const doc = Bokeh.documents[0];
      if (doc.is_idle) drawn();
      else doc.idle.connect(drawn);
    });
  } else {
    drawn();
  }
})();
